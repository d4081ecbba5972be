"""Training of our own small models, and the tables of docs/evidence.md. See evidence/README.md."""
