"""Reports as one HTML file: tables, and charts that a browser draws from them."""
