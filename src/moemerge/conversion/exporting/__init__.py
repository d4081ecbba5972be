"""Write a model in another form: as an adapter of its base, or in another layout of experts."""
