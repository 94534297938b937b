"""splitkv inside other software. Modules here import what they integrate with when they are used, not before."""
