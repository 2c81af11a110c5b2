def refuses(layer):
    return "not there yet"
