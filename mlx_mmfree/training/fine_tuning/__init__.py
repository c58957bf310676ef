"""Fine-tuning of loaded models: adapters or all weights, on texts, on preferences or by rewards."""
