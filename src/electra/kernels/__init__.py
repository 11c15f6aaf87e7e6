"""Fast kernels, each beside its plain torch reference and behind one function that chooses between them."""
