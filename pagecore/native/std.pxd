# Parts of the C++ standard library. A module specialises every member of a class for each type of element: with all the
# iterators that Cython's libcpp declares, Cython would take almost half as long again.

cdef extern from "<vector>" namespace "std" nogil:
    cdef cppclass vector[T]:
        cppclass iterator:
            T& operator*()
            iterator operator+(size_t)
            iterator operator-(size_t)
            size_t operator-(iterator)
            iterator operator++()
            bint operator==(iterator)
            bint operator!=(iterator)

        vector() except +
        vector(size_t) except +
        vector(size_t, const T&) except +
        vector(vector&) except +
        vector& operator=(const vector&) except +
        T& operator[](size_t)
        bint operator==(const vector&)
        void assign(size_t, const T&) except +
        void assign[It](It, It) except +
        T& back()
        iterator begin()
        iterator end()
        void clear()
        T* data()
        bint empty()
        iterator erase(iterator, iterator)
        T& front()
        iterator insert[It](iterator, It, It) except +
        void pop_back()
        void push_back(T&) except +
        void reserve(size_t) except +
        void resize(size_t) except +
        void resize(size_t, const T&) except +
        size_t size()
        void swap(vector&)

cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass span[T]:
        span()
        span(T*, size_t)
        span(vector&)
        T& operator[](size_t)
        T* data()
        bint empty()
        size_t size()

cdef extern from "<memory>" namespace "std" nogil:
    cdef cppclass unique_ptr[T]:
        unique_ptr()
        unique_ptr(T*)
        T& operator*()
        T* get()
        T* release()
        void reset()
        void reset(T*)

    cdef cppclass shared_ptr[T]:
        shared_ptr()
        shared_ptr(T*) except +
        shared_ptr(shared_ptr[T]&)
        T& operator*()
        T* get()
        void reset()
        void reset(T*) except +
