"""Text by domains: files of rows, row formats, tokens, padded batches."""
