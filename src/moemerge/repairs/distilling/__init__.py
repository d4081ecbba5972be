"""Train a merged model on the next-token distributions of its sources."""
