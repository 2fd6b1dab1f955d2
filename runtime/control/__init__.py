"""Control messages and the links they travel on."""
