// Launches of kernels: a copy of the arguments, made when the work is queued.
#pragma once

namespace standin {

// As in modules.c.
struct packed { void (*body)(void *), (*destroy)(void *); };

template <class... A> struct arguments : packed {
    void (*kernel)(A...);
    std::tuple<std::decay_t<A>...> values;

    template <size_t... I> arguments(void (*kernel)(A...), void **given, std::index_sequence<I...>)
        : kernel(kernel), values(*(std::decay_t<A> *)given[I]...) {
        body = [](void *self) {
            auto *mine = static_cast<arguments *>(static_cast<packed *>(self));
            std::apply(mine->kernel, mine->values);
        };
        destroy = [](void *self) { delete static_cast<arguments *>(static_cast<packed *>(self)); };
    }
};

template <class... A> static packed *pack(void (*kernel)(A...), void **given) {
    return new arguments<A...>(kernel, given, std::index_sequence_for<A...>());
}

} // namespace standin
