# Builds and runs the native code and its drivers with sanitizers, without Python. `make sanitize` calls this file.
#
#   make sanitize                    planted faults first, then every driver
#   make sanitize SEED=7 SCALE=10    other random numbers, ten times as many rounds
#   make -f tests/native/sanitize.mk plain           without sanitizers
#   make -f tests/native/sanitize.mk plain LIBRARIES=build/temp.X    with the code of the package, which setup.py built
#   ... LIBRARIES=build/temp.X AMX=hardware          and with its kernels for AMX, where AMX exists or cannot be emulated
#   make -f tests/native/sanitize.mk plain CXX=aarch64-linux-gnu-g++ LDFLAGS=-static LAUNCH=qemu-aarch64
#
# A sanitizer needs its own objects, in build/sanitize/KIND/. A driver consists of a room's sources, the room's tests and
# the harness. -Og -g1 takes half the time of -O1 -g, and reports still name lines.
#
# The tests of a room are compiled as one translation unit: apart, they instantiate the same templates and take twice the
# time. Their names must differ; a test that defines a macro for a header is a unit of its own (APART).

BUILD ?= build/sanitize
SEED ?= 1
SCALE ?= 1
MACHINE := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine)))
OUT := $(BUILD)/$(MACHINE)

FLAGS := -std=c++20 -g1 -fno-omit-frame-pointer -fno-math-errno -Wall -Wextra -Werror -Wno-psabi -I. -Ithird_party -pthread
# GCC 16 warns of numbers that are set wherever they are used.
FLAGS += -Wno-error=maybe-uninitialized
# At -Og, GCC 14 cannot inline what xxHash asks it to.
FLAGS += -DXXH_NO_INLINE_HINTS=1
# The compiler collects its garbage beyond 1 GB: below, it would take a twelfth of the time.
FLAGS += --param ggc-min-heapsize=1000000
# AMX is emulated, so that the drivers check it on any machine with the rest of x86-64-v4-amx.
AMX ?= emulated
FLAGS += $(if $(filter emulated,$(AMX)),-DPC_AMX_EMULATED)
# Assertions of the standard library, locals filled with a pattern, and annotations of the used part of vectors.
ASAN := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -ftrivial-auto-var-init=pattern \
        -D_GLIBCXX_ASSERTIONS -D_GLIBCXX_SANITIZE_VECTOR
TSAN := -fsanitize=thread
FLAGS_asan := -Og $(ASAN)
FLAGS_tsan := -Og $(TSAN)
# Linked with the libraries of the package, drivers take longer to compile than to run.
FLAGS_plain := $(if $(LIBRARIES),-Og -g0,-O2)

# As in setup.py.
ISAS_x86_64 := v2 v3 v4 v4_bf16 v4_amx
ISAS_aarch64 := neon
MARCH_v2 := -march=x86-64-v2
MARCH_v3 := -march=x86-64-v3
MARCH_v4 := -march=x86-64-v4
MARCH_v4_bf16 := -march=x86-64-v4 -mavx512bf16 -mavx512vbmi -mavx512vnni
MARCH_v4_amx := -march=x86-64-v4 -mavx512bf16 -mavx512vbmi -mavx512vnni
MARCH_neon := -march=armv8-a

HARNESS := tests/native/main.cpp tests/native/sanitizers.cpp
CODE_index := $(wildcard pagecore/index/*/*.cpp pagecore/index/radix/*/*.cpp) $(HARNESS)
HOST_ops := $(filter-out pagecore/ops/cpu/isa/%,$(wildcard pagecore/ops/cpu/*.cpp pagecore/ops/cpu/*/*.cpp))
CODE_ops := $(HOST_ops) $(ISAS_$(MACHINE):%=pagecore/ops/cpu/isa/%.cpp) \
            $(ISAS_$(MACHINE):%=pagecore/ops/cpu/isa/latent_%.cpp) $(HARNESS)
CODE_tiers := $(wildcard pagecore/tiers/*.cpp pagecore/tiers/*/*.cpp) $(HARNESS)
ifdef LIBRARIES
# Only what emulates AMX is compiled again; its objects come before the libraries.
CODE_index := $(HARNESS)
CODE_tiers := $(HARNESS)
CODE_ops := $(HARNESS)
ifeq ($(AMX),emulated)
CODE_ops += pagecore/ops/cpu/dispatch.cpp $(patsubst %,pagecore/ops/cpu/isa/%.cpp,\
            $(filter v4_amx latent_v4_amx,$(ISAS_$(MACHINE)) $(ISAS_$(MACHINE):%=latent_%)))
endif
OUT := $(OUT)/package-$(AMX)
LINK_LIBRARIES := -Wl,--start-group $(wildcard $(LIBRARIES)/libpagecore_*.a) -Wl,--end-group
endif
# The custom calls for XLA are headers that call ops.
CODE_interop := $(CODE_ops)
# The kernels, for tests/ops/native/panels.cpp and amx.cpp.
LEVELS_ops := $(ISAS_$(MACHINE):%=tests/ops/native/levels/%.cpp)
# Headers of the standard library, compiled once for each kind: they take a second of each unit. A unit with flags of a
# level cannot use them.
HEADERS := algorithm array atomic bit chrono cmath compare cstdint cstdio cstdlib cstring exception functional iterator \
           latch limits map memory mutex new numeric optional set span sstream stdexcept string string_view thread \
           type_traits unordered_map utility vector
# Single-threaded tests are left out of TSan.
TESTS_asan = $(wildcard tests/$(1)/native/*.cpp)
TESTS_plain = $(TESTS_asan)
TESTS_tsan = $(shell grep -lE 'in_threads|std::thread' tests/$(1)/native/*.cpp)
MORE_asan = $(LEVELS_$(1))
MORE_plain = $(LEVELS_$(1))
APART := tests/ops/native/amx.cpp tests/tiers/native/content_chain.cpp

# tests/ops/native/hooks.cpp wraps kernels().
LINK_asan_ops := -Wl,--wrap=_ZN8pagecore3cpu7kernelsEv
LINK_plain_ops := $(LINK_asan_ops)
# tests/index/native/radix_memory.cpp wraps operator new and new[].
LINK_asan_index := -Wl,--wrap=_Znwm,--wrap=_Znam
LINK_plain_index := $(LINK_asan_index)

# TSan of GCC 12 crashes if address randomisation exceeds its assumptions (vm.mmap_rnd_bits over 28).
LAUNCH ?= $(shell setarch "$$(uname -m)" -R true 2>/dev/null && echo setarch "$$(uname -m)" -R)
TIMEOUT ?= timeout 900

.PHONY: sanitize asan tsan plain FORCE
.DELETE_ON_ERROR:
sanitize: asan tsan
asan tsan: %: $(OUT)/%/index.plants $(OUT)/%/ops.plants $(OUT)/%/tiers.plants \
           $(OUT)/%/index.run $(OUT)/%/ops.run $(OUT)/%/interop.run $(OUT)/%/tiers.run
plain: $(OUT)/plain/index.run $(OUT)/plain/ops.run $(OUT)/plain/interop.run $(OUT)/plain/tiers.run

define driver # kind, room
TOGETHER_$(1)_$(2) := $(OUT)/$(1)/tests/$(2)/native/together.cpp
# Written again only if the list of tests has changed.
$$(TOGETHER_$(1)_$(2)): FORCE
	@mkdir -p $$(@D)
	@printf '#include "%s"\n' $(filter-out $(APART),$(call TESTS_$(1),$(2))) > $$@.new
	@cmp -s $$@.new $$@ || mv $$@.new $$@
OBJECTS_$(1)_$(2) := $$(TOGETHER_$(1)_$(2):.cpp=.o) $(patsubst %.cpp,$(OUT)/$(1)/%.o,$(CODE_$(2)) \
                     $(filter $(APART),$(call TESTS_$(1),$(2))) $(call MORE_$(1),$(2)))
$(OUT)/$(1)/$(2): $$(OBJECTS_$(1)_$(2))
	@$$(CXX) $$(FLAGS) $$(FLAGS_$(1)) $$(LINK_$(1)_$(2)) $$(LDFLAGS) -o $$@ $$^ $$(LINK_LIBRARIES)
# Phony, so that they run each time.
.PHONY: $(OUT)/$(1)/$(2).run $(OUT)/$(1)/$(2).plants
$(OUT)/$(1)/$(2).plants: $(OUT)/$(1)/$(2)
	@echo "-- $(1) $(2): planted faults"
	@$$(TIMEOUT) sh tests/native/expect_fault.sh $$< $$(LAUNCH)
$(OUT)/$(1)/$(2).run: $(OUT)/$(1)/$(2)
	@echo "-- $(1) $(2)"
	@$$(TIMEOUT) $$(LAUNCH) $$< --seed $$(SEED) --scale $$(SCALE)
-include $$(OBJECTS_$(1)_$(2):.o=.d)
endef
$(foreach kind,asan tsan plain,$(foreach room,index ops interop tiers,$(eval $(call driver,$(kind),$(room)))))

# Additional flags of single files.
define level # isa
%/pagecore/ops/cpu/isa/$(1).o %/pagecore/ops/cpu/isa/latent_$(1).o %/tests/ops/native/levels/$(1).o: EXTRA = $(MARCH_$(1)) -ffp-contract=fast
endef
$(foreach isa,$(ISAS_$(MACHINE)),$(eval $(call level,$(isa))))

define compile # kind
$(OUT)/$(1)/prelude.hpp.gch: tests/native/sanitize.mk
	@mkdir -p $$(@D)
	@printf '#include <%s>\n' $(HEADERS) > $$(@:.gch=)
	@$$(CXX) $$(FLAGS) $$(FLAGS_$(1)) -x c++-header -o $$@ $$(@:.gch=)
$(OUT)/$(1)/%.o: %.cpp $(OUT)/$(1)/prelude.hpp.gch
	@mkdir -p $$(@D)
	@echo "$(1) $$<"
	@$$(CXX) $$(FLAGS) $$(FLAGS_$(1)) $$(or $$(EXTRA),-include $(OUT)/$(1)/prelude.hpp) -MMD -MP -c -o $$@ $$<
$(OUT)/$(1)/%.o: $(OUT)/$(1)/%.cpp $(OUT)/$(1)/prelude.hpp.gch
	@echo "$(1) $$<"
	@$$(CXX) $$(FLAGS) $$(FLAGS_$(1)) -include $(OUT)/$(1)/prelude.hpp -MMD -MP -c -o $$@ $$<
endef
$(foreach kind,asan tsan plain,$(eval $(call compile,$(kind))))
