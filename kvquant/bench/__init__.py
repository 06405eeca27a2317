"""What `kvquant bench` measures: attention on the CPU and on a GPU beside 16-bit peers."""
