// Products of bfloat16 inputs with weights of 8 bits, int8 or float8_e4m3fn. Built and called by eight_bits.py; it knows
// arrays, and no torch.
//
// A weight is stored in tiles of 16 outputs x 64 inputs, as AMX reads them: [outputs / 16][inputs / 64][16][16][4]; the
// last two are an output and an input. All sizes are filled up with zeros, so the last tiles are whole.
//
// AMX multiplies int8 numbers as they are, with two digits of each input, and float8 ones once they are bfloat16, which
// AVX-512 multiplies too. Other processors have nothing that is faster than torch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include <optional>
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_PAIRS 1
#include <immintrin.h>
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

using std::int64_t;
using Half = uint16_t; // a bfloat16

constexpr int64_t LANES = 16, DEPTH = 64, TILE = LANES * DEPTH, PAIR = 2 * LANES;
constexpr float BASE = 254; // twice the largest digit

struct Product {
    const uint8_t* weight;
    const float* scale; // [inputs / span][outputs]
    const float* bias;  // [outputs], or null
    int64_t outputs, inputs, span; // span: inputs that share a scale, a multiple of 64 unless it is all
    bool is_float;
    const Half* x; // [rows][inputs]
    Half* out;     // [rows][outputs]
    int64_t rows;

    int64_t depth() const { return (inputs + DEPTH - 1) / DEPTH; }
    int64_t pairs() const { return (outputs + PAIR - 1) / PAIR; }
    int64_t steps_of_scale() const { return (span + DEPTH - 1) / DEPTH; }
};

template <class To, class From> To bits(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from));
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

float widened(Half x) { return bits<float>(uint32_t(x) << 16); }

Half rounded(float x) {
    uint32_t b = bits<uint32_t>(x), even = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return Half((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even);
}

// Memory that a thread uses again and again.
template <class T> T* room(T*& have, int64_t& size, int64_t wanted) {
    if (wanted > size) {
        std::free(have);
        have = static_cast<T*>(std::aligned_alloc(64, (wanted * sizeof(T) + 4095) / 4096 * 4096));
        size = have ? wanted : 0;
    }
    return have;
}

void write(const Product& p, int64_t row, int64_t begin, const float* sums, float factor) {
    int64_t count = std::min(PAIR, p.outputs - begin);
    Half* out = p.out + row * p.outputs + begin;
    for (int64_t i = 0; i < count; i++)
        out[i] = rounded(sums[i] * factor + (p.bias ? p.bias[begin + i] : 0.0f));
}

// The scales of 32 outputs, filled up.
void scales(const Product& p, int64_t block, int64_t begin, float* to) {
    int64_t count = std::min(PAIR, p.outputs - begin);
    for (int64_t i = 0; i < PAIR; i++) to[i] = i < count ? p.scale[block * p.outputs + begin + i] : 0.0f;
}

#ifdef HAS_PAIRS

// ---- AVX-512 with bfloat16

constexpr int64_t ROWS_AT_ONCE = 128; // whose inputs stay in the processor's cache

// The inputs' offset of a row, in tiles.
int64_t place_of(const Product& p, int64_t row) { return row / LANES * p.depth() * 2 * TILE + row % LANES * 64; }

// A row of inputs as it is, in tiles [depth][2][16][32]: of each four inputs the first two, and the last two.
float write_halves(const Product& p, int64_t row, uint8_t* to) {
    const Half* x = p.x + row * p.inputs;
    for (int64_t step = 0; step < p.depth(); step++, to += 2 * TILE) {
        alignas(64) Half some[DEPTH] = {};
        std::memcpy(some, x + step * DEPTH, 2 * std::min(DEPTH, p.inputs - step * DEPTH));
        for (int64_t i = 0; i < DEPTH; i += 2) std::memcpy(to + i / 2 % 2 * TILE + i / 4 * 4, some + i, 4);
    }
    return 1.0f;
}

// The bytes of bfloat16 numbers, by the lowest seven bits of float8 ones.
struct Table {
    alignas(64) uint8_t low[128], high[128];
    Table() {
        for (int i = 0; i < 128; i++) {
            float one = i < 8 ? i * 0x1p-9f : i < 127 ? bits<float>(uint32_t((i << 20) + (120 << 23))) : NAN;
            low[i] = bits<uint32_t>(one) >> 16, high[i] = bits<uint32_t>(one) >> 24;
        }
    }
} const table;

// A tile of float8 numbers as two of bfloat16: of each four inputs the first two, and the last two.
void convert(const uint8_t* tile, uint8_t* first, uint8_t* last) {
    const __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
    const __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    for (int64_t i = 0; i < TILE; i += 64) {
        _mm_prefetch(tile + i + 4 * TILE, _MM_HINT_T0);
        __m512i numbers = _mm512_shuffle_epi8(_mm512_loadu_si512(tile + i), apart);
        __m512i low = _mm512_permutex2var_epi8(low0, numbers, low1);
        __m512i high = _mm512_permutex2var_epi8(high0, numbers, high1);
        high = _mm512_ternarylogic_epi32(high, numbers, sign, 0xf8); // high | numbers & sign
        _mm512_store_si512(first + i, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(last + i, _mm512_unpackhi_epi8(low, high));
    }
}

// 32 outputs of `count` rows of one tile. converted: room for bfloat16 weights, of all steps if `keeps`; they are there
// already unless `is_first`.
template <int count>
void sum_pairs(const Product& p, int64_t pair, const uint8_t* inputs, uint8_t* converted, bool is_first, bool keeps, float (*sums)[PAIR]) {
    const uint8_t* weight = p.weight + 2 * pair * p.depth() * TILE;
    __m512 sum[count][2] = {};
    for (int64_t step = 0; step < p.depth(); step++, weight += TILE) {
        uint8_t* here = converted + (keeps ? step : 0) * 4 * TILE;
        for (int side = 0; is_first && side < 2; side++)
            convert(weight + side * p.depth() * TILE, here + side * TILE, here + (2 + side) * TILE);
        for (int half = 0; half < 2; half++) {
            const uint8_t* x = inputs + (2 * step + half) * TILE;
            for (int64_t line = 0; line < LANES; line++) {
                const uint8_t* two = here + 2 * half * TILE + line * 64;
                const __m512bh left = (__m512bh)_mm512_load_si512(two), right = (__m512bh)_mm512_load_si512(two + TILE);
                for (int i = 0; i < count; i++) {
                    int32_t one;
                    std::memcpy(&one, x + i * 64 + line * 4, 4);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(one);
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, both);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], right, both);
                }
            }
        }
        if ((step + 1) % p.steps_of_scale() == 0 || step + 1 == p.depth()) {
            alignas(64) float scale[PAIR];
            scales(p, step / p.steps_of_scale(), pair * PAIR, scale);
            for (int i = 0; i < count; i++)
                for (int side = 0; side < 2; side++) {
                    float* to = sums[i] + side * LANES;
                    _mm512_store_ps(to, _mm512_fmadd_ps(sum[i][side], _mm512_load_ps(scale + side * LANES), _mm512_load_ps(to)));
                    sum[i][side] = _mm512_setzero_ps();
                }
        }
    }
}

void some_pairs(const Product& p, int64_t pair, int64_t begin, int64_t end, const uint8_t* inputs, const float* units, uint8_t* converted) {
    for (int64_t row = begin, count; row < end; row += count) {
        count = end - row >= 8 ? 8 : end - row >= 4 ? 4 : 1;
        alignas(64) float sums[8][PAIR] = {};
        const auto sum = count == 8 ? sum_pairs<8> : count == 4 ? sum_pairs<4> : sum_pairs<1>;
        sum(p, pair, inputs + place_of(p, row), converted, row == begin, end - begin > count, sums);
        for (int64_t i = 0; i < count; i++) write(p, row + i, pair * PAIR, sums[i], units[row + i]);
    }
}

// ---- AMX

#ifdef HAS_TILES

constexpr int64_t STEPS_AT_ONCE = 4; // of 64 inputs that are converted before they are multiplied

struct alignas(64) Config {
    uint8_t palette = 0, start = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of both tiles of inputs and both of outputs. 4, 5: inputs. 6, 7: weights. oneDNN may believe that
// the tiles of this thread are as it left them.
struct Configured {
    Config before;
    explicit Configured(int64_t rows) {
        Config mine;
        mine.palette = 1;
        for (int i = 0; i < 8; i++) mine.columns[i] = 64, mine.rows[i] = i < 6 ? rows : 16;
        _tile_storeconfig(&before);
        _tile_loadconfig(&mine);
    }
    ~Configured() { before.palette ? _tile_loadconfig(&before) : _tile_release(); }
};

// A row of inputs as two int8 digits to the base, the high ones first, in tiles [depth][2][16][64]. Returns what the low
// ones count.
float write_digits(const Product& p, int64_t row, uint8_t* to) {
    const Half* x = p.x + row * p.inputs;
    Half largest = 0;
    for (int64_t i = 0; i < p.inputs; i++) largest = std::max<Half>(largest, x[i] & 0x7fff);
    float unit = std::max(widened(largest), 1e-30f) / (127 * BASE), inverse = 1 / unit;
    for (int64_t step = 0; step < p.depth(); step++, to += 2 * TILE) {
        alignas(64) Half some[DEPTH] = {};
        std::memcpy(some, x + step * DEPTH, 2 * std::min(DEPTH, p.inputs - step * DEPTH));
        for (int64_t i = 0; i < DEPTH; i++) {
            float all = widened(some[i]) * inverse, high = std::nearbyint(all * (1 / BASE));
            to[i] = int8_t(int32_t(high));
            to[TILE + i] = int8_t(int32_t(std::nearbyint(all - high * BASE)));
        }
    }
    return largest < 0x7f80 ? unit : NAN;
}

// Adds what the tiles have summed up, times the scales.
template <bool is_float, bool is_two> void drain(const float* scale, int64_t rows, float (*sums)[PAIR]) {
    alignas(64) uint32_t found[4][LANES][LANES];
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
    if (is_two) {
        _tile_stored(2, found[2], 64);
        _tile_stored(3, found[3], 64);
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t side = 0; side < 2; side++)
            for (int64_t i = 0; i < LANES; i++) {
                uint32_t one = found[row / LANES * 2 + side][row % LANES][i];
                float sum = is_float ? bits<float>(one)
                                     : float(int32_t(one)) * BASE + float(int32_t(found[2 + side][row % LANES][i]));
                sums[row][side * LANES + i] += sum * scale[side * LANES + i];
            }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// 32 outputs of one tile of rows as digits, or of one or two (`is_two`) as they are. inputs: their tiles. converted:
// room for bfloat16 weights, of all steps if `keeps`; they are there already unless `is_first`.
template <bool is_float, bool is_two>
void sum_up(const Product& p, int64_t pair, const uint8_t* inputs, uint8_t* converted, bool is_first, bool keeps, int64_t rows, float (*sums)[PAIR]) {
    const int64_t depth = p.depth(), next = depth * 2 * TILE; // the next tile of rows
    const uint8_t* weights[2] = {p.weight + 2 * pair * depth * TILE, p.weight + (2 * pair + 1) * depth * TILE};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < depth; step++) {
        const uint8_t* x = inputs + step * 2 * TILE;
        if (is_float) {
            uint8_t* here = converted + (keeps ? step : step % STEPS_AT_ONCE) * 4 * TILE;
            if (is_first && step % STEPS_AT_ONCE == 0)
                for (int64_t i = 0; i < std::min(STEPS_AT_ONCE, depth - step); i++)
                    for (int side = 0; side < 2; side++)
                        convert(weights[side] + (step + i) * TILE, here + (4 * i + side) * TILE, here + (4 * i + 2 + side) * TILE);
            for (int half = 0; half < 2; half++, x += TILE, here += 2 * TILE) {
                _tile_loadd(4, x, 64);
                _tile_loadd(6, here, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, here + TILE, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (is_two) {
                    _tile_loadd(5, x + next, 64);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        } else {
            _tile_loadd(4, x, 64);
            _tile_loadd(5, x + TILE, 64);
            for (int side = 0; side < 2; side++)
                for (int64_t i = 0; i < TILE; i += 64) _mm_prefetch(weights[side] + (step + 4) * TILE + i, _MM_HINT_T0);
            _tile_loadd(6, weights[0] + step * TILE, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(2, 5, 6);
            _tile_loadd(7, weights[1] + step * TILE, 64);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(3, 5, 7);
        }
        if ((step + 1) % p.steps_of_scale() == 0 || step + 1 == depth) {
            alignas(64) float scale[PAIR];
            scales(p, step / p.steps_of_scale(), pair * PAIR, scale);
            drain<is_float, is_two>(scale, rows, sums);
        }
    }
}

// 32 outputs of these rows.
template <bool is_float> void some_rows(const Product& p, int64_t pair, int64_t begin, int64_t end, const uint8_t* inputs, const float* units, uint8_t* converted) {
    const int64_t each = is_float ? PAIR : LANES;
    for (int64_t row = begin; row < end; row += each) {
        alignas(64) float sums[PAIR][PAIR] = {};
        const uint8_t* from = inputs + place_of(p, row);
        const bool is_first = row == begin, keeps = end - begin > each;
        const int64_t count = std::min(each, end - row);
        if (is_float && count <= LANES)
            sum_up<is_float, false>(p, pair, from, converted, is_first, keeps, count, sums);
        else
            sum_up<is_float, true>(p, pair, from, converted, is_first, keeps, count, sums);
        for (int64_t i = 0; i < count; i++) write(p, row + i, pair * PAIR, sums[i], units[row + i]);
    }
}

bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; } // ARCH_REQ_XCOMP_PERM, XTILEDATA

#endif

// ---- Either

void on_avx512(const Product& p, int threads, bool tiles) {
    static thread_local uint8_t* have = nullptr;
    static thread_local int64_t size = 0;
    const int64_t bytes = (p.rows + PAIR - 1) / PAIR * 2 * p.depth() * 2 * TILE;
    uint8_t* inputs = room(have, size, bytes + p.rows * int64_t(sizeof(float)));
    float* units = reinterpret_cast<float*>(inputs + bytes);
    auto write_row = write_halves;
    auto some = some_pairs;
#ifdef HAS_TILES
    if (tiles) some = p.is_float ? some_rows<true> : some_rows<false>;
    if (tiles && !p.is_float) write_row = write_digits;
#endif
#pragma omp parallel num_threads(threads)
    {
        static thread_local uint8_t* mine = nullptr;
        static thread_local int64_t my_size = 0;
        uint8_t* converted = p.is_float ? room(mine, my_size, (p.depth() + 4) * 4 * TILE) : nullptr;
#ifdef HAS_TILES
        std::optional<Configured> configured;
        if (tiles) configured.emplace(std::min(p.rows, LANES));
#endif
#pragma omp for
        for (int64_t row = 0; row < p.rows; row++) units[row] = write_row(p, row, inputs + place_of(p, row));
        for (int64_t begin = 0; begin < p.rows; begin += ROWS_AT_ONCE) {
            const int64_t end = std::min(begin + ROWS_AT_ONCE, p.rows);
#pragma omp for nowait
            for (int64_t pair = 0; pair < p.pairs(); pair++) some(p, pair, begin, end, inputs, units, converted);
        }
    }
}

#endif

} // namespace

extern "C" {

// The best way here. 2: AMX. 1: AVX-512 with bfloat16, for float8 alone. 0: none.
int best_way() {
#ifdef HAS_TILES
    if (may_use_tiles()) return 2;
#endif
#ifdef HAS_PAIRS
    return 1;
#endif
    return 0;
}

// way: one that is there.
void multiply(const uint8_t* weight, const float* scale, const float* bias, int64_t outputs, int64_t inputs, int64_t span,
              int is_float, const Half* x, int64_t rows, Half* out, int threads, int way) {
#ifdef HAS_PAIRS
    if (rows > 0) on_avx512({weight, scale, bias, outputs, inputs, span, is_float != 0, x, out, rows}, threads, way == 2);
#endif
}
}
