"""Models of machines and of the links between them."""
