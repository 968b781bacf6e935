// Data of the page: JSON, deflated, in base64, as `packed` in assemble.py makes it.

const unpackedData = new Map();

/** Return the data of a name; the same object each time. */
function unpack(name) {
  if (!unpackedData.has(name)) unpackedData.set(name, inflate(document.getElementById(`data-${name}`).textContent));
  return unpackedData.get(name);
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).json();
}
