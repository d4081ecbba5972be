"""How good models are, and whether one is better than another.

catalogue    tasks by their names, or from files
job          everything that can be refused, before a model is loaded
answers      problems answered by models; what is there already is not asked again
scoring      answers judged under a protocol
resampling   intervals and p values by drawing problems again
report       means with their errors, and every pair of models compared
"""
