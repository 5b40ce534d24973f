"""Other libraries' names and layouts over FlashKernel's ops, so that existing code changes one
import."""
