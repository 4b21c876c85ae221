// What adapters add to the outputs of a linear layer: to each row B (A x), of its place. Built and called by lora.py; it
// knows arrays, and no torch.
//
// The matrices of a place are read once for all its rows, as far as its ranks say, and nothing of other places. A few
// rows wait for memory: products of float32 numbers are fast enough for them, on any processor.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

using std::int64_t;
using Half = uint16_t; // a bfloat16

constexpr int64_t LANES = 16, FEW = 4, CHUNK = 512; // FEW: rows, or ranks, that are computed together

using Wide = float __attribute__((vector_size(4 * LANES)));
using Bits = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));

template <class To, class From> To read(const From* from) {
    To to;
    std::memcpy(&to, from, sizeof(to));
    return to;
}

Wide wide(const float* from) { return read<Wide>(from); }
Wide wide(const Half* from) { return (Wide)(__builtin_convertvector(read<Halves>(from), Bits) << 16); }

float widened(float x) { return x; }
float widened(Half x) {
    uint32_t all = uint32_t(x) << 16;
    return read<float>(&all);
}

void round_to(float& to, float x) { to = x; }
void round_to(Half& to, float x) {
    uint32_t b = read<uint32_t>(&x), even = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    to = Half((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even);
}

float total(Wide x) {
    float all[LANES];
    std::memcpy(all, &x, sizeof(x));
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) all[i] += all[i + half];
    return all[0];
}

// Of `rows` rows x `[inputs]` the products with `ranks` rows of A, `[rows][stride]`.
template <int rows, int ranks, class T>
void narrow(const float* x, const T* a, int64_t inputs, float* low, int64_t stride) {
    Wide sum[rows][ranks] = {};
    const int64_t whole = inputs / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        Wide some[rows];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) some[row] = wide(x + row * inputs + i);
#pragma GCC unroll 4
        for (int r = 0; r < ranks; r++) {
            __builtin_prefetch(a + (r + FEW) * inputs + i);
            const Wide one = wide(a + r * inputs + i);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) sum[row][r] += some[row] * one;
        }
    }
    for (int row = 0; row < rows; row++)
        for (int r = 0; r < ranks; r++) {
            float all = total(sum[row][r]);
            for (int64_t i = whole; i < inputs; i++) all += x[row * inputs + i] * widened(a[r * inputs + i]);
            low[row * stride + r] = all;
        }
}

// Adds to sums `[rows][CHUNK]` the products of `ranks` numbers of low with as many rows of B.
template <int rows, int ranks, class T>
void widen(const float* low, int64_t stride, const T* b, int64_t block, int64_t columns, float* sums) {
    const int64_t whole = columns / LANES * LANES;
    Wide factor[rows][ranks];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int r = 0; r < ranks; r++) factor[row][r] = low[row * stride + r] - Wide{};
    for (int64_t i = 0; i < whole; i += LANES) {
        Wide some[ranks];
#pragma GCC unroll 4
        for (int r = 0; r < ranks; r++) {
            __builtin_prefetch(b + (r + FEW) * block + i);
            some[r] = wide(b + r * block + i);
        }
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            Wide sum = wide(sums + row * CHUNK + i);
#pragma GCC unroll 4
            for (int r = 0; r < ranks; r++) sum += factor[row][r] * some[r];
            std::memcpy(sums + row * CHUNK + i, &sum, sizeof(sum));
        }
    }
    for (int64_t i = whole; i < columns; i++)
        for (int row = 0; row < rows; row++)
            for (int r = 0; r < ranks; r++) sums[row * CHUNK + i] += low[row * stride + r] * widened(b[r * block + i]);
}

// Calls with the count as a constant.
template <class Work> void with_constant(int64_t count, Work work) {
    switch (count) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    default: return work(std::integral_constant<int, 4>());
    }
}

template <class Work> void with_constants(int64_t rows, int64_t ranks, Work work) {
    with_constant(rows, [&](auto rows) { with_constant(ranks, [&](auto ranks) { work(rows, ranks); }); });
}

struct Group {
    int64_t place, begin, end; // of sorted rows
};

// See `add`.
template <class T> struct Layer {
    const T *a, *b;
    const int64_t *ranks, *part_of_block;
    int64_t parts, rank, inputs, blocks, block;

    // Ranks from `first` on of one part.
    void narrow_some(const Group& group, int64_t part, int64_t first, const float* x, float* low) const {
        const int64_t count = std::min(FEW, ranks[group.place * parts + part] - first), row_of_a = part * rank + first;
        const T* some = a + (group.place * parts * rank + row_of_a) * inputs;
        for (int64_t row = group.begin; row < group.end; row += FEW)
            with_constants(std::min(FEW, group.end - row), count, [&](auto rows, auto ranks) {
                narrow<rows(), ranks()>(x + row * inputs, some, inputs, low + row * parts * rank + row_of_a, parts * rank);
            });
    }

    // Columns from `first` on of one block.
    void widen_some(const Group& group, int64_t number, int64_t first, const float* low, const int64_t* order, T* out) const {
        const int64_t part = part_of_block[number], used = ranks[group.place * parts + part];
        const int64_t columns = std::min(CHUNK, block - first);
        const T* some = b + (group.place * blocks + number) * rank * block + first;
        alignas(64) float sums[FEW * CHUNK];
        for (int64_t row = group.begin; used && row < group.end; row += FEW) {
            const int64_t count = std::min(FEW, group.end - row);
            for (int64_t one = 0; one < count; one++) {
                const T* from = out + (order[row + one] * blocks + number) * block + first;
                for (int64_t i = 0; i < columns; i++) sums[one * CHUNK + i] = widened(from[i]);
            }
            for (int64_t r = 0; r < used; r += FEW)
                with_constants(count, std::min(FEW, used - r), [&](auto rows, auto ranks) {
                    widen<rows(), ranks()>(
                        low + (row * parts + part) * rank + r, parts * rank, some + r * block, block, columns, sums);
                });
            for (int64_t one = 0; one < count; one++) {
                T* to = out + (order[row + one] * blocks + number) * block + first;
                for (int64_t i = 0; i < columns; i++) round_to(to[i], sums[one * CHUNK + i]);
            }
        }
    }

    void add(int64_t places, const int64_t* place_of_row, int64_t rows, const T* x, T* out, int threads) const {
        static thread_local std::vector<int64_t> order;
        static thread_local std::vector<Group> groups;
        static thread_local std::vector<float> floats;
        order.clear();
        groups.clear();
        for (int64_t place = 0; place < places; place++) {
            if (std::all_of(ranks + place * parts, ranks + (place + 1) * parts, [](int64_t one) { return one == 0; })) continue;
            const int64_t begin = order.size();
            for (int64_t row = 0; row < rows; row++)
                if (place_of_row[row] == place + 1) order.push_back(row);
            if (const int64_t end = order.size(); end > begin) groups.push_back({place, begin, end});
        }
        const int64_t count = order.size(), num_groups = groups.size();
        floats.resize(count * (inputs + parts * rank));
        // Other threads have vectors of their own.
        const int64_t* sorted = order.data();
        const Group* group = groups.data();
        float *wide_x = floats.data(), *low = wide_x + count * inputs;
        const int64_t steps = (rank + FEW - 1) / FEW, chunks = (block + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads) if (count > 0)
        {
#pragma omp for
            for (int64_t row = 0; row < count; row++)
                for (int64_t i = 0; i < inputs; i++) wide_x[row * inputs + i] = widened(x[sorted[row] * inputs + i]);
#pragma omp for collapse(3)
            for (int64_t g = 0; g < num_groups; g++)
                for (int64_t part = 0; part < parts; part++)
                    for (int64_t step = 0; step < steps; step++)
                        if (step * FEW < ranks[group[g].place * parts + part])
                            narrow_some(group[g], part, step * FEW, wide_x, low);
#pragma omp for collapse(3)
            for (int64_t g = 0; g < num_groups; g++)
                for (int64_t number = 0; number < blocks; number++)
                    for (int64_t chunk = 0; chunk < chunks; chunk++)
                        widen_some(group[g], number, chunk * CHUNK, low, sorted, out);
        }
    }
};

} // namespace

extern "C" {

// a: [places][parts][rank][inputs]. b: [places][blocks][rank][block]. ranks: those in use, [places][parts].
// place_of_row: from 1 on, 0 for none. x: [rows][inputs]. out: [rows][blocks][block], which it adds to.
void add(const void* a, const void* b, const int64_t* ranks, const int64_t* part_of_block, int64_t parts, int64_t rank,
         int64_t inputs, int64_t blocks, int64_t block, int is_half, int64_t places, const int64_t* place_of_row,
         int64_t rows, const void* x, void* out, int threads) {
    const auto run = [&](auto one) {
        using T = decltype(one);
        Layer<T>{static_cast<const T*>(a), static_cast<const T*>(b), ranks, part_of_block, parts, rank, inputs, blocks, block}.add(
            places, place_of_row, rows, static_cast<const T*>(x), static_cast<T*>(out), threads);
    };
    is_half ? run(Half()) : run(float());
}
}
