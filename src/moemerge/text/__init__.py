"""Text by domains: files of rows, the forms a row may have, tokens, padded batches."""
