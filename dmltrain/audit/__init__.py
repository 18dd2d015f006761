"""The audit of an elastic job: files that prove which samples were used, and tell a replay what happened.

A folder has for each member the samples that it pushed (samples-MEMBER.jsonl) and the rounds that were committed
(commits-MEMBER.jsonl, lines.py), and for all the views (views.json, views_file.py). The sample checksum of each round
(sample_checksum.py) goes through the servers with the gradients, so that its sum proves what was summed. count.py
counts a folder.
"""
