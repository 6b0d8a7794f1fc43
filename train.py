"""Synchronous training: generate, train, sync weights, again."""
