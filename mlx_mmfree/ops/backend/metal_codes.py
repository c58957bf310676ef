"""How Metal kernels take codes of 1, 2 or 6 bits from packed words, as text for their headers."""

BITS = (1, 2, 6)

CODES = """
    // Codes are taken in parts: of one word, or of three words where codes have 6 bits. Of a part,
    // codes at two indices make a pair. One mask lays it into the last bits of two halves, which are
    // denormal numbers: code / 2^24 with code * 2^n in place of it where inputs have a unit of 2^-n.
    template <int BITS>
    inline int low_place(int pair) {
        if (BITS != 6) return pair;
        return pair < 3 ? pair : (pair < 6 ? pair + 3 : pair + 6);
    }

    template <int BITS>
    inline int high_place(int pair) {
        if (BITS != 6) return pair + 16 / BITS;
        return pair == 7 ? 14 : low_place<6>(pair) + 3;
    }

    // Inputs are multiplied by these, and what is summed of their products with codes by 2^24.
    template <int BITS>
    inline float2 units_of_pair(int pair) {
        const int low = BITS == 6 ? 0 : BITS * pair % 10;
        const int high = BITS == 6 ? (pair == 7 ? 0 : 2) : low;
        float2 units;
        units[0] = 1.0f / static_cast<float>(1 << low);
        units[1] = 1.0f / static_cast<float>(1 << high);
        return units;
    }

    // The bits of three words from `place` on, 24 at least.
    template <typename Words>
    inline uint bits_from(Words words, int place) {
        const int word = place / 32;
        const int shift = place % 32;
        if (shift == 0) return words[word];
        if (shift <= 8 || word == 2) return words[word] >> shift;
        return (words[word] >> shift) | (words[word + 1] << (32 - shift));
    }

    // Words of a part; beside a single one, its bits from the eleventh on.
    template <int BITS, typename Weights>
    inline uint3 words_of_part(Weights weights) {
        uint3 words;
        words[0] = weights[0];
        words[1] = BITS == 6 ? weights[1] : words[0] >> 10;
        words[2] = BITS == 6 ? weights[2] : 0;
        return words;
    }

    // The code at an index of a part.
    template <int BITS>
    inline float code_at(uint3 words, int place) {
        const uint bits = BITS == 6 ? bits_from(words, BITS * place) : words[0] >> (BITS * place);
        return static_cast<float>(bits & ((1u << BITS) - 1));
    }

    template <int BITS, bool HALVES>
    inline float2 pair_of_codes(uint3 words, int pair) {
        constexpr uint BOTH = ((1u << BITS) - 1) * 0x00010001u;
        float2 codes;
        if (!HALVES) {
            codes[0] = code_at<BITS>(words, low_place<BITS>(pair));
            codes[1] = code_at<BITS>(words, high_place<BITS>(pair));
            return codes;
        }
        uint both;
        if (BITS != 6) {
            both = words[BITS * pair / 10] & (BOTH << (BITS * pair % 10));
        } else if (pair < 7) {
            both = bits_from(words, 6 * low_place<6>(pair)) & 0x00FC003Fu;
        } else {
            both = (words[2] >> 14 & 0x0000003Fu) | (words[2] >> 4 & 0x003F0000u);
        }
        return float2(as_type<half2>(both));
    }
"""
