"""A package, so that no other package named tests is imported in its place."""
