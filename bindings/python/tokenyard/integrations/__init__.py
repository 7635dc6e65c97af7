"""Adapters to frameworks that have an interface of their own for the exchange of tokens.

Each imports its framework only when it is used.
"""
