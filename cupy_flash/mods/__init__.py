"""User-written score_mod and mask_mod: traced once into expressions, differentiated, and generated as code."""
