"""Several models in step on the same tokens, and the skeleton that repairs share."""
