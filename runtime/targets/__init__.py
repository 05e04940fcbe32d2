"""Targets: language models that verify drafts."""
