"""Refit every linear map of a merged model, in closed form or by gradient steps, layer by layer."""
