"""Layer specs for ``--spec``: architectures that Megatron's own modules do not build."""
