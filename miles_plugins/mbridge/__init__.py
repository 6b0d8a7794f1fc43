"""Bridges: how checkpoints of an architecture that the core does not know map to Megatron's."""
