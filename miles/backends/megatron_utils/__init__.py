"""Training on megatron-core: tensor, pipeline, context and expert parallelism under the contract."""
