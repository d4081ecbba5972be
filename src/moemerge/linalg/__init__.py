"""Matrix-free linear operators and the conjugate gradient method."""
