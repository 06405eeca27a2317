"""What models of transformers are like: configs, loading, latents, positions, projections."""
