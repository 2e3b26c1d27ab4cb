"""The step of one rank of many: what tensor, pipeline and data parallelism leave to a rank, as a model to plan for."""
