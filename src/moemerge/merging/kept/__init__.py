"""What is kept of each model beside a merged one, and how a model is taken out again."""
