"""What every room uses: data types, interfaces, metrics, errors, files, random streams, the CPU."""
