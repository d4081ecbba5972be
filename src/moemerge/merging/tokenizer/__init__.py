"""The output's tokenizer, and embeddings mapped to its vocabulary; from files and tensors alone.

The rules are those that mergekit 0.1.5's results follow:

* `base`: the base model's vocabulary (without one, the first model's). `<model>`: that model's; it
  need not be merged. `union`: the base's with its ids, then the other models' ordinary tokens,
  model by model, then their added tokens. New tokens under `tokens:` come last.
* Each model's embedding (and head) is mapped to that vocabulary before the method runs. A token
  that a model does not have gets the row that `tokens:` names; else the base's; else the mean of
  the models that have it; else (`<model>` outside the merge) zero. `force` uses the named row for
  all.
* A token whose id is beyond a model's embedding counts as missing in this model (in a union with
  models that have it, mergekit fails). The written tokenizer omits such tokens of its donor.
* The output has exactly one row per token, and `config.json` agrees. Spare rows of an input (Qwen's
  152064 for 151665) are dropped. `pad_to_multiple_of` adds spare rows, each with the mean row.
* Without a tokenizer setting, embeddings of different sizes are refused.

Intended differences from mergekit:

* Models have the config's order, and a model's tokens the order of their ids. mergekit's order
  comes from hash tables, so that ids of the same config change from run to run.
* With `source: base` a new token under `tokens:` gets its row in every model. mergekit takes the
  base's spare row of that number, or fails if there is none.
* Gaps in the donor's ids (mergekit: IndexError) are kept and hold the mean row.
* bos/eos/pad ids in `config.json` and `generation_config.json` follow the tokenizer's donor, so
  that generation with `tokenizer_source: <model>` ends as with that model.
"""
