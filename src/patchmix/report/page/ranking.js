// Neighbours from quantised embeddings. Whole numbers below 2^53 add up exactly, so the order is the one Python checked.

export class Ranking {
  // packed: {bits, dim, codes (base64, little-endian), repairs: {query: [neighbours]}}
  constructor(packed, count) {
    const bytes = Uint8Array.from(atob(packed.codes), (letter) => letter.charCodeAt(0));
    this.codes = packed.bits === 8 ? new Int8Array(bytes.buffer) : new Int16Array(bytes.buffer);
    this.dim = packed.dim;
    this.count = count;
    this.repairs = packed.repairs;
    this.lengths = Float64Array.from({ length: count }, (_, i) => Math.sqrt(this.dot(i, i)));
  }

  dot(i, j) {
    const { codes, dim } = this;
    let sum = 0;
    for (let d = 0, a = i * dim, b = j * dim; d < dim; d++) sum += codes[a + d] * codes[b + d];
    return sum;
  }

  cosine(i, j) { return this.dot(i, j) / (this.lengths[i] * this.lengths[j] || 1); }

  // The k nearest images of a query, itself left out: [[position, cosine], …]. Equal ones in the set's order.
  nearest(query, k) {
    const repaired = this.repairs[query];
    if (repaired && k <= repaired.length) return repaired.slice(0, k).map((place) => [place, this.cosine(query, place)]);
    const all = [];
    for (let i = 0; i < this.count; i++) if (i !== query) all.push([i, this.cosine(query, i)]);
    return all.sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, k);
  }
}

// exp(s/τ′)/exp(1/τ′), in (0, 1].
export const normalisedSimilarity = (cosine, temperature) => Math.exp((Math.min(cosine, 1) - 1) / temperature);

// How many neighbours each class has, and kNN's vote: [[label, count, weight], …], the strongest first.
export function tally(neighbours, labels, temperature) {
  const found = new Map();
  for (const [place, cosine] of neighbours) {
    const entry = found.get(labels[place]) ?? [labels[place], 0, 0];
    entry[1] += 1;
    entry[2] += Math.exp((cosine - neighbours[0][1]) / temperature);
    found.set(labels[place], entry);
  }
  return [...found.values()].sort((a, b) => b[2] - a[2] || a[0] - b[0]);
}
