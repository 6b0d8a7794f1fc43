"""Training on megatron-core: tensor, pipeline, context and expert parallelism for one contract."""
