"""Measurements that ``kvasir bench`` gets from kvasir-lab."""
