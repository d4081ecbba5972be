"""Refit every linear map of a merged model in closed form, layer by layer."""
