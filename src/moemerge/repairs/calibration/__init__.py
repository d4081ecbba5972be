"""HARC: solve for the routers of a merged model, layer by layer."""
