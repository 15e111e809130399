"""What is known, what is wanted, and what was there before: models, kubelet checkpoints, ledger, store."""
