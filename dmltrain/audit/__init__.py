"""Audits: files that prove which samples were used, and tell a replay of an elastic job what happened.

The folder of an elastic job's audit has two files for each member: the samples that it pushed (samples-MEMBER.jsonl)
and the rounds that were committed (commits-MEMBER.jsonl); lines.py has their format. views.json has all views
(views_file.py). The servers sum a sample checksum (sample_checksum.py) together with the gradients of a round, so the
sum proves which samples are in it. count.py checks a folder. draws.py and count_draws.py are for every other loop.
"""
