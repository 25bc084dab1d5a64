"""Measurements of the device: does a row's result depend on its place or on the bucket?"""
