"""Evaluate models on benchmarks, and compare them.

job           tasks, requests, and all checks before a model is loaded
answers       problems answered by models; known answers are reused
scoring       answers judged under a protocol
significance  standard errors, paired tests, bootstrap intervals and p values
report        means with standard errors, and every pair of models compared
bridge        tasks of lm-eval
page          the HTML page and the model card
"""
