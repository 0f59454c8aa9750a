"""User-written score_mod and mask_mod: they are traced once into expressions, differentiated and compiled."""
