"""Steps of a model as CUDA graphs, and as graphs of torch.compile."""
