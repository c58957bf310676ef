"""Turns a transformer into a model with other token mixers, which learns from it in stages."""
