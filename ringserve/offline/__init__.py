"""The offline API: ``ringserve.LLM`` runs batches of prompts in Python, over the server's processes but without HTTP.

    LLM -- Engine == rings ==> tokenizer <==> scheduler <==> executor

The user's process is the supervisor of the three others and takes the frontend's place among them.
"""
