"""Measures servers: rates and waiting times of many clients, and what parked sessions take."""
