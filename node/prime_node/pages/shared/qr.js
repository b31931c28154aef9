/* A QR code (ISO/IEC 18004) of a short text: byte mode, mask 0; versions 5 to 9 with error correction M, 18 to 22 with L. Rows of booleans; null if it is too long. */
const VERSIONS = {5: [24, [43, 43], [6, 30]], 6: [16, [27, 27, 27, 27], [6, 34]], 7: [18, [31, 31, 31, 31], [6, 22, 38]], 8: [22, [38, 38, 39, 39], [6, 24, 42]], 9: [22, [36, 36, 36, 37, 37], [6, 26, 46]],
  /* level L, for a link with an invitation */
  18: [30, [120, 120, 120, 120, 120, 121], [6, 30, 56, 82], 1], 19: [28, [113, 113, 113, 114, 114, 114, 114], [6, 30, 58, 86], 1], 20: [28, [107, 107, 107, 108, 108, 108, 108, 108], [6, 34, 62, 90], 1], 22: [28, [111, 111, 112, 112, 112, 112, 112, 112, 112], [6, 26, 50, 74, 98], 1]};
const EXP = [], LOG = [];
for (let i = 0, x = 1; i < 255; i++) { EXP[i] = x; LOG[x] = i; x <<= 1; if (x > 255) x ^= 0x11d; }
const times = (a, b) => a && b ? EXP[(LOG[a] + LOG[b]) % 255] : 0;

function correction(data, size) {
  let poly = [1];
  for (let i = 0; i < size; i++) { const next = [...poly, 0]; poly.forEach((c, j) => { next[j + 1] ^= times(c, EXP[i]); }); poly = next; }
  const rest = [...data, ...Array(size).fill(0)];
  data.forEach((_, i) => { const lead = rest[i]; if (lead) poly.forEach((c, j) => { rest[i + j] ^= times(c, lead); }); });
  return rest.slice(data.length);
}
function checked(value, bits, divisor, divisorBits) {
  let rest = value << bits;
  for (let i = 31 - Math.clz32(rest || 1); i >= divisorBits; i = 31 - Math.clz32(rest || 1)) rest ^= divisor << (i - divisorBits);
  return value << bits | rest;
}

export function qrCode(text) {
  const bytes = [...new TextEncoder().encode(text)], total = v => VERSIONS[v][1].reduce((a, b) => a + b, 0);
  const version = Object.keys(VERSIONS).map(Number).find(v => bytes.length + (v < 10 ? 2 : 3) <= total(v));
  if (!version) return null;
  const [size, blocks, centres, level = 0] = VERSIONS[version], n = 17 + 4 * version;
  let bits = "0100" + bytes.length.toString(2).padStart(version < 10 ? 8 : 16, "0") + bytes.map(b => b.toString(2).padStart(8, "0")).join("") + "0000";
  const words = bits.match(/.{8}/g).map(b => parseInt(b, 2));
  for (let pad = 0xec; words.length < total(version); pad ^= 0xec ^ 0x11) words.push(pad);
  let at = 0;
  const data = blocks.map(length => words.slice(at, at += length)), fixes = data.map(block => correction(block, size)), all = [];
  for (let i = 0; i < Math.max(...blocks); i++) data.forEach(block => i < block.length && all.push(block[i]));
  for (let i = 0; i < size; i++) fixes.forEach(block => all.push(block[i]));

  const grid = Array.from({length: n}, () => Array(n).fill(null));
  const set = (x, y, dark) => { if (x >= 0 && y >= 0 && x < n && y < n) grid[y][x] = !!dark; };
  for (const [cx, cy] of [[3, 3], [n - 4, 3], [3, n - 4]]) for (let y = -4; y <= 4; y++) for (let x = -4; x <= 4; x++) { const d = Math.max(Math.abs(x), Math.abs(y)); set(cx + x, cy + y, d !== 2 && d !== 4); }
  for (let i = 8; i < n - 8; i++) { set(i, 6, i % 2 === 0); set(6, i, i % 2 === 0); }
  for (const cy of centres) for (const cx of centres) {
    if ((cx === 6 && cy === 6) || (cx === 6 && cy === n - 7) || (cx === n - 7 && cy === 6)) continue;
    for (let y = -2; y <= 2; y++) for (let x = -2; x <= 2; x++) set(cx + x, cy + y, Math.max(Math.abs(x), Math.abs(y)) !== 1);
  }
  const format = checked(level << 3, 10, 0x537, 10) ^ 0x5412;  /* 0: level M, 1: level L; mask 0 */
  for (let i = 0; i < 15; i++) {
    const dark = format >> i & 1;
    set(8, i < 6 ? i : i < 8 ? i + 1 : n - 15 + i, dark);
    set(i < 8 ? n - 1 - i : i < 9 ? 7 : 14 - i, 8, dark);
  }
  set(8, n - 8, true);
  if (version >= 7) { const bits = checked(version, 12, 0x1f25, 12); for (let i = 0; i < 18; i++) { const dark = bits >> i & 1, a = Math.floor(i / 3), b = n - 11 + i % 3; set(a, b, dark); set(b, a, dark); } }
  let bit = 0;
  for (let right = n - 1, up = true; right > 0; right -= 2, up = !up) {
    if (right === 6) right = 5;
    for (let i = 0; i < n; i++) for (const x of [right, right - 1]) {
      const y = up ? n - 1 - i : i;
      if (grid[y][x] !== null) continue;
      const dark = bit < 8 * all.length ? all[bit >> 3] >> (7 - (bit & 7)) & 1 : 0;
      bit++;
      grid[y][x] = !!(dark ^ ((x + y) % 2 === 0 ? 1 : 0));
    }
  }
  return grid;
}
