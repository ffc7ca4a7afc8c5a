"""The build reads setup.cfg; this file serves tools that look for it."""

from setuptools import setup

setup()
