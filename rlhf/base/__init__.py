"""Basics for all packages: data types, interfaces, metrics, errors, files, random streams, CPU."""
